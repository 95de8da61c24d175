"""The HTTP edge: OpenAI-compatible API, page, limits. Text and JSON stay here; token ids go down to the engine.

`schema` says what a request may hold, `prepare` turns one into engine requests, `runner` owns the engine thread,
`output` + `reasoning` + `tools` turn events back into messages, `stream` writes them as JSON or server-sent events, `app` ties it up.
"""
