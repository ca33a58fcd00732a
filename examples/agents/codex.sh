# codex (npm install -g @openai/codex) as a program of `rollout.agent.command`, with its shell:
#   command = ["sh", "examples/agents/codex.sh"]
export CODEX_HOME=$(mktemp -d)
trap 'rm -rf "$CODEX_HOME"' EXIT
cat > "$CODEX_HOME/config.toml" <<END
model = "policy"
model_provider = "ludus"
[model_providers.ludus]
name = "ludus"
base_url = "$OPENAI_BASE_URL"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
END
mkdir "$CODEX_HOME/work"
python3 -c 'import json, sys; print("\n".join(one["content"] for one in json.load(sys.stdin)["messages"]))' |
    codex exec --cd "$CODEX_HOME/work" --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox -
