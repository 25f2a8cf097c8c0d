"""The server's database: schema, migrations, and one module of queries per kind of record.

Functions take a connection, so that callers can combine them in one transaction of `Database`.
"""
