"""The SDK: clients, futures, request queues, retries, polling and HTTP."""
