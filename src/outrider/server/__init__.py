"""The HTTP edge: OpenAI-compatible API, page, limits. Text and JSON stay here; token ids go down to the engine.

`schema` says what a request may hold, `app` reads and admits it, `prepare` turns it into engine requests, `grammars`
compiles what it must match, `runner` owns the engine thread, `output` + `reasoning` + `tools` turn events back into
messages, `answer` collects them, a `wire` writes them, `protocol` bounds connections, `fair` lets clients take turns.
"""
