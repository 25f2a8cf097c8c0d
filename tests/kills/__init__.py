"""Kills the processes of a cluster at random while the official SDK trains and samples."""
