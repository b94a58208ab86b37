// OpenAI's npm client on recorded outputs.
import OpenAI from "openai";
import { reads } from "./recordings.mjs";

const client = new OpenAI({ baseURL: process.env.JUDGE_URL + "/v1", apiKey: "none", maxRetries: 0, timeout: 120_000 });
const asked = (recording) => ({ model: recording.model, messages: [{ role: "user", content: "Hi" }], tools: recording.tools });

function found(message) {
  const calls = (message.tool_calls ?? []).map((call) => [call.function.name, call.function.arguments]);
  return { text: message.content ?? "", calls };
}

await reads("whole", async (recording) => {
  const { message } = (await client.chat.completions.create(asked(recording))).choices[0];
  return { ...found(message), thought: message.reasoning_content ?? "" };
});
await reads("stream_helper", async (recording) => {
  return found((await client.chat.completions.stream(asked(recording)).finalChatCompletion()).choices[0].message);
});
