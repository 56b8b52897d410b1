"""The gradients of all nodes, and the pure step of a simulation."""
