"""The interfaces of other simulators, on vecgym."""
