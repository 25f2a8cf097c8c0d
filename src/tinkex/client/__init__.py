"""The SDK: clients, futures, and everything between a call and its answer."""
