"""Pipeline orchestration: which stages to skip, start or resume, and a report of the results.

Each stage is a separate process, started with a printed command.
"""
