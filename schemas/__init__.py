"""The wire contract of Penstock: messages, subjects, streams, block names and error codes.

Imports nothing of ours. Every message is a frozen msgspec Struct in MessagePack. Fields are only ever
added, last and with a default; readers ignore what they do not know, so old and new processes share a log.
"""
