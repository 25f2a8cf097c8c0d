"""The compatibility matrix: official SDKs, their command and the cookbook against a real server."""
