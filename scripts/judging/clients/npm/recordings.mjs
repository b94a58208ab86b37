// What the scripts of recorded outputs share, as clients/recordings.py: each recording is read in one way and compared.
import { readFileSync } from "node:fs";
import { isDeepStrictEqual } from "node:util";

const all = JSON.parse(readFileSync(process.env.JUDGE_RECORDINGS));

function parsed(text) {
  try {
    return typeof text === "string" ? JSON.parse(text) : text;
  } catch {
    return null; // a recording that was cut within its arguments
  }
}

const values = (calls) => calls.map(([name, text]) => [name, parsed(text)]);

export async function reads(way, task) {
  const forms = new Map();
  for (const recording of all.filter((one) => one.calls.every(([, text]) => parsed(text) !== null))) {
    if (!forms.has(recording.form)) forms.set(recording.form, []);
    try {
      const got = await task(recording);
      got.calls = values(got.calls);
      const wanted = { text: recording.text, thought: recording.thought, calls: values(recording.calls) };
      for (const key of Object.keys(got)) {
        if (!isDeepStrictEqual(got[key], wanted[key])) {
          forms.get(recording.form).push(`${recording.model}: ${JSON.stringify(got[key])}, not ${JSON.stringify(wanted[key])}`);
        }
      }
    } catch (fault) {
      forms.get(recording.form).push(`${recording.model}: ${fault}`);
    }
  }
  for (const [form, wrong] of forms) {
    console.log(JSON.stringify({ check: `${way}: ${form}`, ok: wrong.length === 0, why: wrong.join("; ").slice(0, 600) }));
  }
}
