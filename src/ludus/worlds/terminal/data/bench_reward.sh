exec 3>&1 1>&2
mkdir -p {place}/logs/verifier
bash {place}/tests/test.sh 3>&-
cat {place}/logs/verifier/reward.txt >&3 || cat {place}/logs/verifier/reward.json >&3
