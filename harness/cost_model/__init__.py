"""What simulated engines stand on: costs, response lengths, decoding as events, devices, and a task without content."""
