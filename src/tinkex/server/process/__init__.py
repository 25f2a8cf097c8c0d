"""Server processes: supervisor, API processes, worker process and their set-up."""
