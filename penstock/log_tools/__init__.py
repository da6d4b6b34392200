"""Tools over the log: requests, timelines, traces, exports, replays, decisions made again."""
