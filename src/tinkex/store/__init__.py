"""What the house remembers: tables, the database behind them, and one module per kind of record.

Functions take a connection, so that several of them make one transaction; `Database` opens it.
"""
