"""HTTP in front of promises: any number of stateless API processes, and the one that starts all."""
