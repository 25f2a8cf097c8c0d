"""Server processes: the supervisor, the API processes, the worker process and their setup."""
