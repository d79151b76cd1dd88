// Runs the checker of the npm package `tla-checker` over a module: node checker.mjs PACKAGE SPEC CFG MAX
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const [folder, spec, config, maxStates] = process.argv.slice(2);
const checker = await import(pathToFileURL(join(folder, "tla_checker.js")));
checker.initSync({ module: readFileSync(join(folder, "tla_checker_bg.wasm")) });
const options = {
  cfg_source: readFileSync(config, "utf8"),
  allow_deadlock: true,
  max_states: Number(maxStates),
  max_depth: Number(maxStates),
};
console.log(checker.check_spec_with_options(readFileSync(spec, "utf8"), JSON.stringify(options)));
