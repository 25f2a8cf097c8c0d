"""Several ranks of one worker: a leader, which runs the jobs, and followers that compute for it."""
