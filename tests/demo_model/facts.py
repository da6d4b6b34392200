"""Facts about Penstock that the demo model learns, and questions for them.

Training uses the subjects in the training frames and all but the last question of each fact. The last questions and the
held-out frames are for evaluation only.
"""

from random import Random
from typing import NamedTuple

from tests.demo_model.sample import Sample
from tests.demo_model.words import COMMON


class Fact(NamedTuple):
    """One answer.

    Attributes:
        kind: "what": the subjects are noun phrases; "how": they are actions.
        subjects: filled into the frames.
        asks: complete questions; the last one is held out.
    """

    kind: str
    subjects: tuple[str, ...]
    answer: str
    asks: tuple[str, ...]


_FRAMES = {
    "what": (
        "What is {s}?",
        "What is {s} for?",
        "What does {s} do?",
        "Tell me about {s}.",
        "Explain {s}.",
        "Can you explain {s}?",
        "Please describe {s}.",
        "I want to know about {s}.",
        "What do you know about {s}?",
        "{s}?",
        "What's {s}?",
        "Could you tell me what {s} is?",
        "Help me understand {s}.",
        "What is meant by {s}?",
        "Say something about {s}.",
        "Do you know {s}?",
        "How does {s} work?",
        "Does Penstock have {s}?",
        "Does Penstock support {s}?",
        "How is it with {s}?",
        "{s}",
    ),
    "how": (
        "How do I {s}?",
        "How can I {s}?",
        "How to {s}?",
        "What is the command to {s}?",
        "I want to {s}. How?",
        "How does one {s}?",
        "Tell me how to {s}.",
        "Explain how to {s}.",
        "What do I do to {s}?",
        "Can you show me how to {s}?",
        "I need to {s}.",
        "How would I {s}?",
        "Please tell me how I can {s}.",
        "I would like to {s}.",
        "Can I {s}?",
        "Can Penstock {s}?",
        "How do you {s}?",
        "{s}",
    ),
}
HELD_FRAMES = {
    "what": (
        "Please explain to me what {s} is.",
        "I have a question: what is {s}?",
        "Can you describe {s} for me?",
        "What can you tell me about {s}?",
        "I would like to know what {s} does.",
    ),
    "how": (
        "Can you tell me how to {s}?",
        "What must I do to {s}?",
        "I do not know how to {s}. Please help me.",
        "Show me how I can {s}.",
        "What is the way to {s}?",
    ),
}
_BEFORE = ("Hi! ", "Hello, ", "Please: ", "Quick question: ", "So, ", "In Penstock: ", "Now, ", "Hey, ", "OK. ", "And ")
_AFTER = (" Thanks!", " Please.", " Thank you.", " Be brief.", " I am new here.", " In one sentence.")


def _f(kind: str, subjects: str, answer: str, *asks: str) -> Fact:
    return Fact(kind, tuple(subjects.split("|")), answer, asks)


FACTS = (
    _f("what", "Penstock|the Penstock project|this project|penstock|this software",
       "Penstock serves large language models as an event-sourced pipeline on NATS JetStream.",
       "What is this?", "What software am I using?", "What is this software called Penstock?"),
    _f("what", "the gateway|Penstock's gateway|a gateway|the front door",
       "The gateway is the front door: it checks a request, renders the chat template, tokenises it and streams the "
       "answer.",
       "Which part takes HTTP requests?", "Which process renders the chat template?",
       "Which process is the front door for HTTP?"),
    _f("what", "the router|Penstock's router|a router|routing",
       "The router sends each request to the worker that already holds most of its prompt in its KV cache.",
       "Who chooses the worker?", "Which part picks a worker for a request?",
       "Which process chooses the worker for a request?"),
    _f("what", "a worker|the worker|Penstock's worker|the worker process",
       "A worker pulls jobs from its own queue, runs the model and streams the tokens.",
       "Which process runs the model?", "Who computes the tokens?",
       "Which part computes the tokens and runs the model?"),
    _f("what", "the broker|the message broker|the NATS server|nats-server",
       "The broker is a NATS server with JetStream; it stores every stream of Penstock.",
       "Which broker does Penstock use?", "What stores the streams?", "Which server stores the streams?"),
    _f("what", "the streams|the list of streams|Penstock's streams|the JetStream streams",
       "The streams are SUBMIT, REQUESTS, WORK, KV, TOKENS and DONE.",
       "Which streams are there?", "Name the streams.", "What are the names of the streams?",
       "What streams does Penstock have?"),
    _f("what", "the REQUESTS stream|stream REQUESTS|REQUESTS|the stream of requests",
       "The REQUESTS stream holds accepted requests on their way from the gateway to the router.",
       "Where are accepted requests stored?", "Which stream has the accepted requests?",
       "What stream lies between the gateway and the router?", "Which stream is between gateway and router?"),
    _f("what", "the WORK stream|stream WORK|WORK|the stream of jobs",
       "The WORK stream carries the jobs from the router to each worker.",
       "Which stream carries the jobs?", "Where are jobs stored?", "In which stream are the jobs?"),
    _f("what", "the KV stream|stream KV|the stream of KV events|KV events",
       "The KV stream carries the workers' cache events to the router.",
       "Which stream carries cache events?", "Where do cache events go?", "Which stream has the cache events?"),
    _f("what", "the TOKENS stream|stream TOKENS|TOKENS|the stream of tokens",
       "The TOKENS stream carries the tokens from the workers to the gateways and keeps them for some minutes.",
       "Which stream carries the tokens?", "Where are tokens stored?", "In which stream are the tokens?"),
    _f("what", "the DONE stream|stream DONE|DONE|the terminal event",
       "The DONE stream holds the one terminal event of every request, with usage and timings.",
       "Where are terminal events stored?", "Which stream has the terminal events?",
       "In which stream is the terminal event?"),
    _f("what", "the SUBMIT stream|stream SUBMIT|SUBMIT|the NATS front door",
       "The SUBMIT stream takes OpenAI bodies that clients publish over NATS.",
       "Which stream takes requests over NATS?", "Where do NATS clients publish?",
       "Which stream do NATS clients publish to?"),
    _f("how", "start Penstock|start everything|run Penstock|start the whole deployment|launch Penstock|run it|start it|"
       "start this|use Penstock",
       "Run `make up`, or `penstock up` if it is installed.",
       "How does it start?", "Which command starts everything?", "How do I begin?", "Which command starts the whole of Penstock?"),
    _f("how", "start a worker|run a worker|add a worker|start one more worker|launch a worker",
       "Run `penstock worker`; start as many as you like, in any order.",
       "Which command starts a worker?", "How do I get another worker?", "Which command do I use to start a worker?"),
    _f("how", "start a gateway|run a gateway|add a gateway|launch a gateway",
       "Run `penstock gateway`; any number of gateways can run at once.",
       "Which command starts a gateway?", "How do I get another gateway?",
       "Which command do I use to start a gateway?"),
    _f("how", "start a router|run a router|add a router|launch a router",
       "Run `penstock router`; all routers share one durable consumer.",
       "Which command starts a router?", "How do I get another router?", "Which command do I use to start a router?"),
    _f("how", "start the broker|run the broker alone|start NATS|launch the broker",
       "Run `penstock nats`; it starts the broker alone, with generated users.",
       "Which command starts the broker?", "How do I get a broker?", "Which command do I use to start the broker?"),
    _f("how", "create the streams|make the streams|apply the streams|check the streams",
       "Run `penstock streams apply`; it creates or checks the streams and never deletes.",
       "Which command creates the streams?", "Who makes the streams?", "Which command do I use to create the streams?"),
    _f("how", "explain a request|see what happened to a request|find out why a worker was chosen|trace a request",
       "Run `penstock explain ID`; it shows what happened to a request, and why.",
       "Which command explains a request?", "What happened to my request?",
       "Which command shows what happened to a request?"),
    _f("how", "measure a server|benchmark a server|benchmark Penstock|run a benchmark",
       "Run `penstock bench http`; it loads an OpenAI URL and measures.",
       "Which command runs a benchmark?", "How fast is my server?", "Which command measures a server?"),
    _f("how", "measure the index|benchmark the index|benchmark the router",
       "Run `penstock bench index`; it measures the router's index.",
       "Which command measures the index?", "How fast is the index?", "Which command do I use to measure the index?"),
    _f("how", "run the tests|test Penstock|check the code|run all tests",
       "Run `make test`; it runs every check and test.",
       "Which command runs the tests?", "Are there tests?", "Which command do I use to run the tests?"),
    _f("how", "see the versions|print the version|find the version",
       "Run `penstock version`.",
       "Which version is this?", "Which command prints the version?", "Which command do I use to see the version?"),
    _f("how", "use my own model|serve another model|run another model|choose the model|change the model",
       "Give `--model` a directory in Hugging Face form or a hub id.",
       "Which flag names the model?", "Which models can I use?", "Which flag do I use to choose the model?"),
    _f("how", "run more workers|set the number of workers|have two workers",
       "Use `penstock up --workers N`.",
       "Which flag sets the number of workers?", "Can I have four workers?", "Which flag do I use for more workers?"),
    _f("how", "use my own NATS|use another NATS server|use an existing broker",
       "Use `--nats-url` with the address of your server.",
       "Which flag names the NATS server?", "Can I bring my own NATS?", "Which flag do I use for my own NATS server?"),
    _f("how", "change the port|set the HTTP port|use another port",
       "Use `--http-port`; the default is 8000.",
       "Which port does it listen on?", "What is the default port?", "Which flag changes the HTTP port?"),
    _f("how", "stop Penstock|stop everything|shut Penstock down|end it|stop it|quit",
       "Press Ctrl-C; it drains and stops.",
       "How does it stop?", "What does Ctrl-C do?", "How can I make Penstock stop?"),
    _f("how", "set a flag by environment|use environment variables|configure it by environment",
       "Every flag is also an environment variable: `--http-port` is `PENSTOCK_HTTP_PORT`.",
       "Are there environment variables?", "What is PENSTOCK_HTTP_PORT?", "Which environment variables are there?"),
    _f("how",
       "re-attach to a stream|go on after the connection breaks|resume a broken answer|get the rest of an answer",
       "Ask any gateway for `/v1/requests/ID/stream` with the header `Last-Event-ID`.",
       "My connection broke. What now?", "What is Last-Event-ID for?",
       "How can I get the rest after my connection broke?"),
    _f("how", "see the state of a request|get the result of a request later|look up a request",
       "Ask `/v1/requests/ID`; it gives the state and the result.",
       "Where is the state of a request?", "Is my request done?", "Where can I see the state of my request?"),
    _f("how", "find the request id|get the id of a request|learn the id of my request",
       "It is in the answer's `X-Request-Id` header.",
       "Where is the request id?", "Which header has the id?", "Which header has the id of my request?"),
    _f("how", "use the OpenAI client|use the openai library|connect an OpenAI client",
       "Set its `base_url` to `http://127.0.0.1:8000/v1`; any API key will do.",
       "Which base_url do I use?", "Does the OpenAI client work?", "Which base_url does the OpenAI client need?"),
    _f("how", "submit over NATS|send a request over NATS|use NATS instead of HTTP",
       "Publish the same JSON body to `ps.submit.MODEL` and read the answer from your inbox.",
       "Which subject takes requests?", "To which subject do I publish?", "Can I use it without HTTP?",
       "Which subject do I publish a request to?"),
    _f("how", "stop an answer at a word|use stop strings|end at a stop string",
       "Give `stop` a list of strings.",
       "Are there stop strings?", "What is the option stop?", "Which option do I use for stop strings?"),
    _f("how", "set a deadline|limit the time of a request|set a timeout",
       "Use `timeout_s`, the request's deadline in seconds.",
       "What is timeout_s?", "Is there a deadline?", "Which option sets the deadline?"),
    _f("how", "set the priority|make a request more important|give a request priority",
       "Set `priority` to interactive, standard or batch.",
       "Which priorities are there?", "Are there priorities?", "Which option sets the priority of a request?"),
    _f("how", "separate tenants|keep tenants apart|not share the cache between tenants",
       "Give each tenant its own `cache_salt`; they then share no KV cache.",
       "What is cache_salt?", "Do tenants share the cache?", "Which option keeps tenants apart?"),
    _f("how", "watch the metrics|get Prometheus metrics|monitor Penstock",
       "Scrape `/metrics`; it is in Prometheus form.",
       "Where are the metrics?", "Is there Prometheus?", "Where can I get the metrics?"),
    _f("how", "check the health|know whether it is ready|probe readiness",
       "Ask `/health/ready`; it is true only if a request can be served.",
       "Is there a health check?", "What is /health/ready?", "Where can I check the health?"),
    _f("how", "list the models|see which models are served",
       "Ask `/v1/models`.",
       "Which models are served?", "What is /v1/models?", "Where can I see the list of models?"),
    _f("how", "read the API documentation|see the OpenAPI page|find the API docs",
       "Open `/docs` in a browser.",
       "Where is the documentation of the API?", "Is there an OpenAPI page?", "Where can I read the API docs?"),
    _f("what", "the KV cache|a KV cache|KV|the cache of keys and values",
       "The KV cache keeps the attention keys and values of earlier tokens, so that they are computed once.",
       "Why is there a cache?", "What does KV mean?", "What does the KV cache keep?"),
    _f("what", "KV-aware routing|routing by cache|cache-aware routing",
       "KV-aware routing folds cache events into an index and steers each prompt to the worker that holds most of it.",
       "Why does routing look at the cache?", "How does the router use the cache?", "In what way does KV-aware routing use the cache?"),
    _f("what", "the radix index|the index|the prefix index|the router's index",
       "The index is a radix tree of block hashes that says which worker holds which prefix.",
       "How does the router know the prefixes?", "What kind of index is it?",
       "What kind of tree is the index of the router?"),
    _f("what", "a block|a KV block|the blocks|block size|the block size",
       "A block is the KV cache of 32 tokens, the default block size.",
       "How many tokens are in a block?", "How large is a block?", "How many tokens does one KV block have?"),
    _f("what", "a block digest|the block hash|block hashes|the digest of a block",
       "A block's digest is a blake3 hash chained over its tokens and all blocks before it.",
       "How are blocks named?", "Which hash is used?", "Which hash names the blocks?"),
    _f("what", "the prefix cache|prefix caching|cached prefixes",
       "The prefix cache reuses KV blocks of earlier requests that begin with the same tokens.",
       "Are prompts reused?", "Why is the second request faster?", "What does the prefix cache reuse?"),
    _f("what", "a lease|the lease|leases|a worker's lease",
       "A lease says that a worker is alive; it lasts 3 seconds and must be renewed.",
       "How long is a lease?", "How is it known that a worker is alive?", "How long does the lease of a worker last?"),
    _f("what", "a fence|fencing|the fence",
       "A fence is an item in the token stream behind which an older attempt's tokens no longer count.",
       "How are late tokens dropped?", "What stops a zombie?", "Why do the tokens of an older attempt not count?",
       "How are the tokens of an old attempt dropped?"),
    _f("what", "an attempt|the attempt number|attempts",
       "An attempt is one try of a request on one worker; after four it fails with worker_lost.",
       "How many attempts are there?", "What is worker_lost?", "How many attempts does a request have?"),
    _f("what", "JetStream|NATS JetStream|jetstream",
       "JetStream is the part of NATS that stores messages in durable streams.",
       "Which part of NATS stores messages?", "Are messages durable?", "What part of NATS is durable?",
       "Which part of NATS has durable streams?"),
    _f("what", "event sourcing|the event-sourced pipeline|an event-sourced pipeline",
       "Event-sourced means: everything that decides about a request is in a durable, ordered log that anyone can "
       "fold again.",
       "Why is it event-sourced?", "What does event-sourced mean?", "Can you explain what event-sourced means?"),
    _f("what", "the demo model|this model|the bundled model|tiny demo model",
       "The demo model is a small language model trained from scratch on synthetic data, for demonstrations only.",
       "Which model is this?", "How were you trained?", "Which model answers here?"),
    _f("what", "the native engine|native engine|the engine native",
       "The native engine is Penstock's own: transformers computes the model; the paged pool, prefix cache and "
       "scheduler are ours.",
       "Which engine is the default?", "Which engine runs on CPUs?", "Which engine is Penstock's own?"),
    _f("what", "the mock engine|mock engine|the engine mock",
       "The mock engine has real blocks and a real scheduler but no model; it is for load tests.",
       "Which engine has no model?", "How are load tests done?", "What is used for load tests?",
       "Which engine is for load tests?"),
    _f("what", "the scheduler|Penstock's scheduler|continuous batching|chunked prefill",
       "The scheduler fills each engine step with tokens of many sequences: continuous batching with chunked prefill.",
       "How are requests batched?", "Who fills a step?", "How are sequences batched?",
       "How are many sequences batched in one step?"),
    _f("what", "prefill|the prefill|the prefill phase",
       "Prefill computes the KV cache of the whole prompt and gives the first token.",
       "Which phase reads the prompt?", "Where does the first token come from?", "Which phase gives the first token?"),
    _f("what", "decode|the decode phase|decoding",
       "Decode computes one token after another from the KV cache.",
       "Which phase makes the tokens one by one?", "What comes after prefill?", "Which phase comes after prefill?"),
    _f("what", "disaggregation|disaggregated serving|disaggregated prefill",
       "Disaggregated serving runs prefill and decode on different workers and hands the KV cache over.",
       "Why are prefill and decode on different workers?", "Can prefill and decode be separate?",
       "Can prefill and decode run on different workers?"),
    _f("what", "NIXL|nixl|the NIXL library",
       "NIXL is the library that moves KV blocks from one worker's memory to another's.",
       "Which library moves KV blocks?", "How does the KV cache get to another worker?",
       "Which library moves the cache to another worker?"),
    _f("what", "schemas|the folder schemas|the schemas package",
       "The folder `schemas` is the wire contract: messages, subjects, streams and codes; it imports nothing of ours.",
       "Where is the wire contract?", "Where are the messages defined?", "Which folder has the wire contract?"),
    _f("what", "infra|the folder infra|the infra package",
       "The folder `infra` runs and observes the rest: the command, the supervisor, the broker and the benchmarks.",
       "Where is the supervisor?", "Where is the command line?", "In which folder is the supervisor?",
       "Which folder has the supervisor?"),
    _f("what", "configs|the folder configs|the configs package",
       "The folder `configs` has the settings of every process, logging and the bundled models.",
       "Where are the settings?", "Where are the bundled models?", "Which folder has the settings?"),
    _f("what", "the supervisor|penstock up|`penstock up`|make up",
       "`penstock up` runs broker, routers, workers and gateways on one machine and restarts what dies.",
       "What restarts dead processes?", "What does penstock up restart?", "Who watches the processes?",
       "What does the supervisor restart?"),
    _f("what", "a killed worker|the death of a worker|worker failure|a crash of a worker",
       "If a worker is killed, another one goes on behind the last stored token; nothing is lost.",
       "What happens when a worker dies?", "What if a worker is killed?", "What if I kill the worker process?",
       "What happens if a worker crashes?",
       "What happens if I kill a worker?"),
    _f("what", "a killed gateway|the death of a gateway|gateway failure|a crash of a gateway",
       "If a gateway is killed, its requests run on; clients re-attach to the stream on any other gateway.",
       "What happens when a gateway dies?", "What if the gateway is killed?", "What if I kill the gateway process?",
       "What happens if a gateway crashes?",
       "What happens if I kill a gateway?"),
    _f("what", "a killed broker|the death of the broker|broker failure|a crash of the broker",
       "If the broker is killed, all processes wait for its restart, reconnect and resend.",
       "What happens when the broker dies?", "What if the broker is killed?", "What if I kill the broker process?",
       "What happens if the broker crashes?",
       "What happens if I kill the broker?"),
    _f("what", "a killed router|the death of a router|router failure|a crash of a router",
       "If a router is killed, unplaced requests are delivered again; placed ones do not notice.",
       "What happens when a router dies?", "What if the router is killed?", "What if I kill the router process?",
       "What happens if a router crashes?",
       "What happens if I kill a router?"),
    _f("what", "the status 429|error 429|status code 429|a full queue",
       "429 means that the queue is full; the header `Retry-After` says when to try again.",
       "Why do I get 429?", "What does 429 mean?", "Why did I get the error 429?"),
    _f("what", "the status 503|error 503|status code 503",
       "503 means that the broker is away.",
       "Why do I get 503?", "What does 503 mean?", "Why did I get the error 503?"),
    _f("what", "the status 504|error 504|status code 504|a missed deadline",
       "504 means that the deadline was missed.",
       "Why do I get 504?", "What does 504 mean?", "Why did I get the error 504?"),
    _f("what", "the status 404|error 404|status code 404|an unknown model",
       "404 means that the model is unknown.",
       "Why do I get 404?", "What does 404 mean?", "Why did I get the error 404?"),
    _f("what", "the license|Penstock's license|the licence",
       "Penstock is licensed under Apache-2.0.",
       "Which license does it have?", "Is Penstock open source?", "Which license does Penstock have?"),
    _f("what", "the required Python|the Python version|the needed Python version",
       "You need Python 3.11 or newer and `make`, nothing else.",
       "Which Python do I need?", "What are the requirements?", "Which Python version does Penstock need?"),
    _f("what", "etcd|an operator|Kubernetes operators|the need for etcd",
       "Penstock needs no etcd and no operator: one `pip install` brings everything, the broker too.",
       "Do I need etcd?", "Is an operator needed?", "Does Penstock need etcd?"),
    _f("what", "state.json|the state file|the file state.json",
       "`state.json` in the data directory has the URLs and process ids of a deployment.",
       "Where are the process ids?", "Where are the URLs?", "Which file has the process ids?"),
    _f("how", "use a GPU|run on a GPU|run it on a GPU|use CUDA|choose the device",
       "Give `--device cuda`; by default the native engine takes a CUDA GPU if there is one, else the CPU.",
       "Does Penstock support GPUs?", "Does it run on a GPU?", "Is there GPU support?", "Do I need a GPU?",
       "Which device does it use?", "Does it work with GPUs?", "Can it compute on GPUs?"),
    _f("how", "start prefill and decode workers|split prefill and decode|run separate prefill and decode workers|"
       "have more prefill workers|start a decode worker|start a prefill worker",
       "Run `penstock up --prefill N --decode M`; each worker then does only its part.",
       "Which flags separate prefill from decode?", "What is the flag --prefill for?", "What does --decode M mean?",
       "Which flags do I use for prefill and decode workers?"),
    _f("how", "start an encode worker|run separate encode workers|have an encode worker|add an encode worker",
       "Run `penstock up --encode K` together with `--prefill N --decode M`.",
       "Which flag starts encode workers?", "What is the flag --encode for?", "Which flag do I use for encode workers?"),
    _f("what", "an encode worker|the encode worker|encode workers|the encoder of images",
       "An encode worker turns images into embeddings and hands them over for prefill.",
       "Which worker looks at images?", "Who computes embeddings of images?",
       "Which worker computes the embeddings of images?"),
    _f("what", "a prefill worker|the prefill worker|prefill workers",
       "A prefill worker computes the KV cache of prompts and hands it to decode workers.",
       "Which worker reads the prompts?", "Who hands the KV cache over?",
       "Which worker hands the KV cache to decode workers?"),
    _f("what", "a decode worker|the decode worker|decode workers",
       "A decode worker takes over the KV cache of a prompt and computes the rest of the answer.",
       "Which worker takes over the KV cache?", "Who goes on after the prefill worker?",
       "Which worker goes on when the prefill worker has ended?"),
    _f("what", "the KV hand-off|KV hand-off|the hand-off of the KV cache|KV transfer|the transfer of KV blocks",
       "The KV hand-off moves the KV blocks of a prompt from a prefill worker to a decode worker over NIXL.",
       "How do KV blocks move between workers?", "How is the KV cache handed over?",
       "How are KV blocks handed to a decode worker?"),
    _f("how", "send an image|ask about an image|ask about a picture|send a picture|use images",
       "Put an `image_url` part into a chat message; the model must be one that sees, as `demo-vision` does.",
       "Does Penstock support images?", "Can I ask about images?", "Does it take pictures?", "Are images possible?",
       "Can a chat message have an image?"),
    _f("what", "demo-vision|the vision model|the model demo-vision|the demo model with eyes",
       "demo-vision is the demo model with eyes: it knows simple coloured shapes.",
       "Which bundled model can see?", "Is there a model that sees?", "Which bundled model sees images?"),
    _f("how", "list the leases|see the leases|show the leases|look at the leases",
       "Run `penstock leases`.",
       "Which command shows the leases?", "What is the command penstock leases for?",
       "Which command do I use to see the leases?"),
    _f("what", "the logs|the log files|logging",
       "The logs are in the folder `logs` of the data directory, `.penstock` by default.",
       "Where are the logs?", "Where is the log of a worker?", "Where can I find the log files?"),
)  # fmt: skip


def facts(rng: Random, held: bool) -> Sample:
    fact = rng.choice(FACTS)
    return fact_sample(rng, fact, held)


def fact_sample(rng: Random, fact: Fact, held: bool) -> Sample:
    """A question for this fact, noisy in training, from the held-out ones else."""
    if held:
        question = fact.asks[-1] if rng.random() < 0.4 else _framed(rng, HELD_FRAMES[fact.kind], fact)
    else:
        question = _framed(rng, _FRAMES[fact.kind], fact) if rng.random() < 0.6 else rng.choice(fact.asks[:-1])
        question = noisy(rng, question)
    return Sample("facts", (("user", question),), fact.answer, fact.answer)


def noisy(rng: Random, question: str) -> str:
    """The question as a hurried person writes it: a word too many or too few, no capitals, a greeting."""
    if rng.random() < 0.25:
        words = question.split(" ")
        place = rng.randrange(len(words))
        if rng.random() < 0.6:
            words.insert(place, rng.choice(COMMON))
        elif len(words) > 3 and words[place].lower().strip("?.") in COMMON:
            del words[place]
        question = " ".join(words)
    careless = rng.random() < 0.1  # neither capitals nor a question mark
    if careless or rng.random() < 0.12:
        question = question.lower()
    if careless or rng.random() < 0.12:
        question = question.rstrip("?.")
    if rng.random() < 0.12:
        question = rng.choice(_BEFORE) + question
    if rng.random() < 0.08:
        question += rng.choice(_AFTER)
    return question


def _framed(rng: Random, frames: tuple[str, ...], fact: Fact) -> str:
    text = rng.choice(frames).format(s=rng.choice(fact.subjects))
    return text[:1].upper() + text[1:]
