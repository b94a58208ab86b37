// Vercel's AI SDK on recorded outputs.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, streamText, tool } from "ai";
import { reads } from "./recordings.mjs";

const provider = createOpenAICompatible({ name: "headrace", baseURL: process.env.JUDGE_URL + "/v1", apiKey: "none" });

function asked(recording) {
  const tools = {};
  for (const one of recording.tools) {
    tools[one.function.name] = tool({ inputSchema: jsonSchema({ type: "object" }) });
  }
  return { model: provider(recording.model), prompt: "Hi", maxRetries: 0, tools };
}

async function found(answer) {
  const calls = (await answer.toolCalls).map((call) => [call.toolName, call.input]);
  return { text: await answer.text, thought: (await answer.reasoningText) ?? "", calls };
}

await reads("whole", async (recording) => found(await generateText(asked(recording))));
await reads("streamed", async (recording) => {
  const answer = streamText({ ...asked(recording), onError: () => {} });
  await answer.consumeStream();
  return found(answer);
});
