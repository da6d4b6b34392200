#!/bin/sh
# Writes .env with a password for each user of the broker and for Grafana. One that is there stays: run it again after an
# upgrade, for the users that are new.
set -eu
cd "$(dirname "$0")"
umask 077
[ -e .env ] || echo COMPOSE_PROJECT_NAME=penstock > .env
USERS='GATEWAY ROUTER WORKER CLIENT VIEWER READER PLANNER KEYS OPERATOR SYS'
for user in $USERS $(printf '%s_2 ' $USERS) GRAFANA; do
  grep -q "^${user}_PASSWORD=" .env && continue
  # A letter first: NATS reads a password that begins with digits as a number.
  echo "${user}_PASSWORD=p$(od -An -tx1 -N16 /dev/urandom | tr -d ' \n')" >> .env
done
echo "passwords are in $PWD/.env"
