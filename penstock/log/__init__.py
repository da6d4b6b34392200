"""The log as people read it: requests, timelines, traces, exports, replays, decisions made again."""
