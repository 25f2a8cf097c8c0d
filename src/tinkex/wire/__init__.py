"""What crosses the network: the endpoint table, the codec, and how faults are spelled."""
