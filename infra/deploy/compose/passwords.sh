#!/bin/sh
# Writes .env with a password for each user of the broker and for Grafana; one that exists stays.
set -eu
cd "$(dirname "$0")"
if [ -e .env ]; then
  echo ".env exists; remove it for new passwords (existing processes then have to be started again)" >&2
  exit 1
fi
umask 077
echo COMPOSE_PROJECT_NAME=penstock > .env
for user in GATEWAY ROUTER WORKER CLIENT OPERATOR SYS GRAFANA; do
  # A letter first: NATS reads a password that begins with digits as a number.
  echo "${user}_PASSWORD=p$(od -An -tx1 -N16 /dev/urandom | tr -d ' \n')"
done >> .env
echo "passwords are in $PWD/.env"
