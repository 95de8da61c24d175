#!/usr/bin/env bash
# lm-eval against a server of ours: multiple choice, perplexity and generation on a small local task, by both of its API clients.
# pip install 'lm_eval[api]' in an environment of its own, then: benchmarks/lm_eval/run.sh http://127.0.0.1:8000 smollm2
set -euo pipefail
url=$1 model=$2
cd "$(dirname "$0")/../.."
export HF_HUB_OFFLINE=1 OPENAI_API_KEY=${OUTRIDER_API_KEY:-none}
lm_eval --model local-completions --model_args "model=$model,base_url=$url/v1/completions,num_concurrent=4,max_retries=1" \
  --include_path benchmarks/lm_eval --tasks capitals,capitals_text,capitals_said,capitals_continued
lm_eval --model local-chat-completions --model_args "model=$model,base_url=$url/v1/chat/completions,num_concurrent=4,max_retries=1" \
  --include_path benchmarks/lm_eval --tasks capitals_said --apply_chat_template
