// The API's reference, drawn from /openapi.json. Text goes in as text nodes only.

import { element } from "./answer.js";
import { ApiError, apiDocument, storeKey, storedKey } from "./api.js";

const at = (id) => document.getElementById(id);

at("key").value = storedKey();
at("unlock").addEventListener("submit", (event) => {
  event.preventDefault();
  storeKey(at("key").value);
  show();
});

async function show() {
  try {
    const text = await apiDocument(at("key").value);
    at("content").replaceChildren(...page(JSON.parse(text)));
    at("unlock").hidden = true;
    if (at("key").value) offer(text);
  } catch (error) {
    const fault = element("p", "fault", `/openapi.json: ${error.message}`);
    fault.setAttribute("role", "alert");
    at("content").replaceChildren(fault);
    if (error instanceof ApiError && error.status === 401) {
      at("unlock").hidden = false;
      at("key").focus();
    }
  }
  at("content").removeAttribute("aria-busy");
}

/** A click on a link sends no key, so it gives what is here already. */
function offer(text) {
  const link = at("document");
  URL.revokeObjectURL(link.href);
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = "openapi.json";
}

show();

function page(spec) {
  const made = [element("p", "", `${spec.info.description} Version ${spec.info.version}.`)];
  for (const { name } of spec.tags) {
    made.push(element("h2", "", name));
    for (const [path, item] of Object.entries(spec.paths)) {
      for (const [method, operation] of Object.entries(item)) {
        if (operation.tags.includes(name)) made.push(operationOf(spec, method, path, operation));
      }
    }
  }
  made.push(element("h2", "", "Objects"));
  for (const [name, schema] of Object.entries(spec.components.schemas)) made.push(objectOf(spec, name, schema));
  return made;
}

function operationOf(spec, method, path, operation) {
  const box = element("details");
  box.id = operation.operationId;
  const summary = element("summary");
  summary.append(
    element("span", "method", method.toUpperCase()),
    element("code", "", path),
    element("span", "about", operation.summary),
  );
  box.append(summary);
  if (operation.security?.length) box.append(element("p", "", "Needs an API key: Authorization: Bearer KEY."));
  const body = operation.requestBody?.content["application/json"].schema;
  for (const schema of body?.anyOf ?? (body ? [body] : [])) {
    box.append(element("h3", "", `Body: ${typeOf(schema)}`), fields(spec, resolve(spec, schema)));
  }
  box.append(element("h3", "", "Answers"), answers(operation.responses));
  return box;
}

function answers(responses) {
  const rows = Object.entries(responses).flatMap(([status, response]) =>
    Object.entries(response.content).map(([type, { schema }]) => [status, type, typeOf(schema), response.description]),
  );
  return table(["status", "type", "content", ""], rows);
}

function objectOf(spec, name, schema) {
  const box = element("details");
  box.id = `object-${name}`;
  const summary = element("summary");
  summary.append(element("code", "", name), element("span", "about", schema.description ?? ""));
  box.append(summary, fields(spec, schema));
  return box;
}

function fields(spec, schema) {
  const required = new Set(schema.required ?? []);
  const rows = Object.entries(schema.properties ?? {}).map(([name, field]) => [
    required.has(name) ? `${name} *` : name,
    typeOf(field),
    "default" in field && field.default !== null ? JSON.stringify(field.default) : "",
    field.description ?? "",
  ]);
  return table(["field", "type", "default", ""], rows);
}

function table(heads, rows) {
  const made = element("table");
  const head = element("tr");
  head.append(...heads.map((text) => element("th", "", text)));
  made.append(head);
  for (const cells of rows) {
    const row = element("tr");
    row.append(...cells.map((text, index) => element("td", "", index === 0 ? undefined : text)));
    row.firstChild.append(element("code", "", cells[0]));
    made.append(row);
  }
  const box = element("div", "scroll");
  box.append(made);
  return box;
}

function resolve(spec, schema) {
  return schema.$ref ? spec.components.schemas[schema.$ref.split("/").pop()] : schema;
}

/** A schema in a few words. */
function typeOf(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map(typeOf).join(" or ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.contentSchema) return `JSON text of ${typeOf(schema.contentSchema)}`;
  if (schema.type === "array") return `list of ${schema.items ? typeOf(schema.items) : "anything"}${size(schema, "Items")}`;
  if (schema.properties?.data) return `events with ${typeOf(schema.properties.data)}`;
  if (schema.type === "object") return "object";
  if (schema.type === "string") return `string${size(schema, "Length")}`;
  return schema.type ? `${schema.type}${range(schema)}` : "anything";
}

function size(schema, what) {
  const [low, high] = [schema[`min${what}`], schema[`max${what}`]];
  if (low === undefined && high === undefined) return "";
  return high === undefined ? ` (at least ${low})` : ` (${low ?? 0} to ${high})`;
}

function range(schema) {
  const low = schema.minimum ?? schema.exclusiveMinimum;
  const high = schema.maximum ?? schema.exclusiveMaximum;
  if (low === undefined && high === undefined) return "";
  const from = schema.exclusiveMinimum === undefined ? `${low}` : `above ${low}`;
  if (high === undefined) return ` (${low === undefined ? "" : `at least ${low}`})`;
  return ` (${from} to ${schema.exclusiveMaximum === undefined ? high : `below ${high}`})`;
}
