"""A router replica: pulls requests, decides with the core, publishes jobs, and mends what dead workers leave.

All state is a fold of logs (KV events, WORK, DONE) and of the workers bucket, so any number of replicas decide
alike, and one that dies leaves nothing behind: requests it had not placed come again, those it had are in WORK.
"""

import asyncio
import contextlib
import random
import secrets
import time
from collections import OrderedDict
from typing import Any

import msgspec
import structlog

from configs.bus.connection import Bus
from configs.bus.fleet import FleetWatch, Member
from configs.bus.log import LogTail
from configs.bus.publish import Ack, Publisher
from configs.bus.pull import ACK, IN_PROGRESS, TERM, Puller
from configs.bus.read import Entry
from configs.settings import RouterSettings
from router.fleet import Fleet
from router.metrics import Metrics
from router.orphans import Orphan, Rescue
from router.places import Places
from router.policy import Policy
from router.waiting import WaitingRoom
from schemas import done, jobs, requests, wire
from schemas.blocks import keys_of
from schemas.errors import Code, ServingError
from schemas.jobs import Decision, Job
from schemas.requests import GenerateRequest, Priority
from schemas.streams import LONGEST_DEADLINE_S
from schemas.subjects import HEADER_LOAD, HEADER_MSG_ID
from schemas.tokens import WHOLE_REQUEST, Finish, TokenBatch, TokenItem

log = structlog.get_logger("router")
