"""The HTTP server: OpenAI-compatible API, page, limits. Text and JSON stay here; the engine gets token ids.

`schema` defines the fields of a request, `app` reads and admits it, `prepare` turns it into engine requests, `grammars`
compiles its grammar, `runner` owns the engine thread, `output` + `reasoning` + `tools` turn events back into messages,
`answer` collects them, a `wire` writes them, `protocol` limits connections, `fair` lets clients take turns.
"""
