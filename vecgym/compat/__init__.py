"""The interfaces of other simulators, for scripts written for them."""
