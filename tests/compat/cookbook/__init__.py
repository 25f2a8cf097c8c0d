"""Recipes of the cookbook, unmodified, with datasets and a model of this project."""
