// What the openai package of npm and the AI SDK make of our answers.
//
//     node with_npm.mjs BASE_URL MODEL IMAGE_URL
//
// Prints one JSON object.
import OpenAI from "openai";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { z } from "zod";

const [baseUrl, model, image] = process.argv.slice(2);
const at = { baseURL: `${baseUrl}/v1`, apiKey: "none" };
const schema = z.object({ city: z.enum(["Bern", "Oslo"]), days: z.union([z.literal(1), z.literal(2)]) });
const prompt = "Is it cold?";
const onError = ({ error }) => { throw error; };
const typed = [], seen = [];

const openai = createOpenAI(at), anthropic = createAnthropic(at);
for (const one of [openai.chat(model), openai.responses(model), anthropic(model)]) {
  const asked = { model: one, maxOutputTokens: 300, temperature: 1, maxRetries: 0, prompt };
  const output = Output.object({ schema });
  typed.push((await generateText({ ...asked, output })).output);
  typed.push(await streamText({ ...asked, output, onError }).output);
  const weather = tool({ description: "the weather", inputSchema: schema, execute: async (taken) => taken });
  const calling = { ...asked, tools: { weather }, toolChoice: "required", stopWhen: stepCountIs(2) };
  const whole = await generateText(calling), streamed = streamText({ ...calling, onError });
  for (const step of [...whole.steps, ...(await streamed.steps)])
    typed.push(...step.toolResults.map((result) => result.output));
  const content = [{ type: "text", text: "What is the total?" }, { type: "image", image }];
  const reading = { model: one, temperature: 0, maxRetries: 0, messages: [{ role: "user", content }] };
  seen.push((await generateText(reading)).text, await streamText({ ...reading, onError }).text);
}

const client = new OpenAI({ ...at, maxRetries: 0 });
const parameters = { type: "object", properties: { city: { enum: ["Bern", "Oslo"] }, days: { enum: [1, 2] } },
  required: ["city", "days"], additionalProperties: false };
const tools = [{ type: "function", function: { name: "weather", parameters, strict: true } }];
const messages = [{ role: "user", content: prompt }];
const { choices } = await client.chat.completions.stream({ model, messages, tools, tool_choice: "required", max_tokens: 300 })
  .finalChatCompletion();
typed.push(...choices[0].message.tool_calls.map((call) => JSON.parse(call.function.arguments)));
const parts = [{ type: "input_text", text: "What is the total?" }, { type: "input_image", image_url: image, detail: "auto" }];
const input = [{ role: "user", content: parts }];
seen.push((await client.responses.create({ model, input, temperature: 0 })).output_text);
seen.push((await client.responses.stream({ model, input, temperature: 0 }).finalResponse()).output_text);
console.log(JSON.stringify({ typed, seen }));
