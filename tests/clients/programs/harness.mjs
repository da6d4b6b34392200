// What the programs for Node.js share, as harness.py for those in Python.
import { readFileSync, writeFileSync } from "node:fs";

export const URL = process.env.CLIENTS_URL ?? "http://127.0.0.1:8000";
export const BASE = URL + "/v1";
export const MODEL = process.env.CLIENTS_MODEL ?? "demo";
export const KEY = process.env.CLIENTS_KEY ?? "none";
export const SUM = "What is 347 + 586?";
export const SUM_IS = "933";
export const WEATHER = "What is the weather in Oslo?";
export const REPORT = '{"result": "7 degrees"}';
export const REPORTED = "7 degrees";
export const PERSON = "Answer in JSON with the keys name and age. Mia is 31 years old.";
export const PERSON_IS = { name: "Mia", age: 31 };
export const CITY_SCHEMA = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };

const CHECK_MS = 60_000;
const checks = [];

export const check = (feature, what, run) => checks.push({ feature, what, run });

export function several(pieces) {
  if (pieces.length < 3) throw new Error(`${pieces.length} pieces: ${pieces}`);
}

export async function run(modules, ...packages) {
  const results = [];
  for (const { feature, what, run } of checks) {
    let problem = "";
    let timer;
    const late = new Promise((_, fail) => {
      timer = setTimeout(() => fail(new Error(`not finished in ${CHECK_MS / 1000} s`)), CHECK_MS);
    });
    try {
      await Promise.race([run(), late]);
    } catch (error) {
      problem = `${error.name}: ${error.message}`.slice(0, 400);
    }
    clearTimeout(timer);
    console.error(`  ${problem ? "failed" : "passed"}  ${feature}: ${what} ${problem}`);
    results.push({ feature, what, problem });
  }
  const versions = Object.fromEntries(
    packages.map((name) => [name, JSON.parse(readFileSync(`${modules}/${name}/package.json`)).version]),
  );
  writeFileSync(process.env.CLIENTS_RESULTS ?? "/dev/stdout", JSON.stringify({ versions, checks: results }) + "\n");
  process.exit(0);
}
