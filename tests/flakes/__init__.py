"""Repeats the tests whose outcome could depend on timing."""
