"""The queue behind sockets: a server with the control plane, and clients in other processes on this node or beyond."""
