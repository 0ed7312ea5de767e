"""The ground of simulated engines: costs, response lengths, decoding as events, devices, and a task without content."""
