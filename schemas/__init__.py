"""The wire contract of Penstock: messages, subjects, streams, block names and error codes.

Imports no other package of Penstock. Every message is a frozen msgspec Struct in MessagePack. Fields are only ever
added, last and with a default; readers ignore unknown fields, so old and new processes share a log.
"""
