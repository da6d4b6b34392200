// Sums tokens by tenant and model from the log of terminal events, and goes on where it stopped.
// npm install @nats-io/transport-node @nats-io/jetstream @msgpack/msgpack
// NATS_USER=operator NATS_PASSWORD=… node billing.mjs nats://127.0.0.1:4222 [sequence]
import { decode } from "@msgpack/msgpack";
import { jetstream } from "@nats-io/jetstream";
import { connect } from "@nats-io/transport-node";

const [servers, from] = process.argv.slice(2);
const nc = await connect({ servers, user: process.env.NATS_USER, pass: process.env.NATS_PASSWORD });
const stream = await jetstream(nc).streams.get("ps_DONE");
const last = (await stream.info()).state.last_seq;
const records = await stream.getConsumer({ opt_start_seq: Number(from ?? 1), deliver_policy: "by_start_sequence" });
const sums = {};
// One terminal event a request: nothing is counted twice, whatever died meanwhile.
for await (const message of last ? await records.consume() : []) {
  const [, kind, tenant, model] = message.subject.split(".");
  if (kind === "done") {
    const { usage = {} } = decode(message.data, { useBigInt64: true });
    const sum = (sums[`${tenant} ${model}`] ??= { requests: 0, prompt: 0, completion: 0 });
    sum.requests += 1;
    sum.prompt += Number(usage.prompt ?? 0);
    sum.completion += Number(usage.completion ?? 0);
  }
  if (message.seq >= last) break;
}
console.log(JSON.stringify({ next: last + 1, sums }, null, 1)); // save `next` with the sums
await nc.close();
