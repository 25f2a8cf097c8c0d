"""The server: a supervisor that runs stateless API processes and a worker process."""
