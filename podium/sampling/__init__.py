"""Where groups of completions come from: prompts, sampling, partial rollouts, demonstrations."""
