"""Running the pipeline: which stage is next, whether it is done, resumed or refused, and a report.

Nothing here computes: every stage is a process of its own, started with a printed command.
"""
