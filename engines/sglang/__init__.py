"""SGLang: an HTTP server that the adapter starts, watches and stops, or one that it is given."""
