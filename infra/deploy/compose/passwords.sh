#!/bin/sh
# Writes .env with a password for each user of the broker and for Grafana, and as which user each role logs in. What is
# there stays: run it again after an upgrade, for what is new.
#
#   ./passwords.sh rotate [ROLE...]   # its other user gets a new password, and what starts from now on logs in as that
#   ./passwords.sh retire [ROLE...]   # ends the password of the user that is no longer in use
#
# Without a role: all but client and sys. docs/runbooks.md says how the servers and processes follow.
set -eu
cd "$(dirname "$0")"
umask 077
[ -e .env ] || echo COMPOSE_PROJECT_NAME=penstock > .env
USERS='GATEWAY ROUTER WORKER CLIENT VIEWER READER PLANNER KEYS OPERATOR SYS'

new() {
  # A letter first: NATS reads a password that begins with digits as a number.
  echo "p$(od -An -tx1 -N16 /dev/urandom | tr -d ' \n')"
}

value() {
  sed -n "s/^$1=//p" .env
}

put() {
  { grep -v "^$1=" .env || true; echo "$1=$2"; } > .env.new
  mv .env.new .env
}

lower() {
  echo "$1" | tr 'A-Z' 'a-z'
}

for user in $USERS $(printf '%s_2 ' $USERS) GRAFANA; do
  [ -n "$(value "${user}_PASSWORD")" ] || put "${user}_PASSWORD" "$(new)"
done
for user in $USERS; do
  role=$(lower "$user") login=$(value "${user}_LOGIN")
  case $login in
    "$role-2":*) now=$role-2:$(value "${user}_2_PASSWORD") ;;
    *) now=$role:$(value "${user}_PASSWORD") ;;
  esac
  [ "$login" = "$now" ] || put "${user}_LOGIN" "$now"
done

verb=${1:-}
case $verb in
  '') echo "passwords are in $PWD/.env"; exit ;;
  rotate | retire) shift ;;
  *) echo "passwords.sh: no command '$verb': there are rotate and retire" >&2; exit 2 ;;
esac
[ $# -gt 0 ] || set -- gateway router worker viewer reader planner keys operator
for role in "$@"; do
  case $role in
    gateway | router | worker | client | viewer | reader | planner | keys | operator) ;;
    sys) echo "passwords.sh: sys: its password is that among the servers, too, which have one only; see docs/runbooks.md" >&2; exit 2 ;;
    *) echo "passwords.sh: no role '$role': there are $(lower "$USERS")" >&2; exit 2 ;;
  esac
done
for role in "$@"; do
  user=$(echo "$role" | tr 'a-z' 'A-Z')
  case $(value "${user}_LOGIN") in
    "$role":*) variable=${user}_2_PASSWORD other=$role-2 ;;
    *) variable=${user}_PASSWORD other=$role ;;
  esac
  put "$variable" "$(new)"
  [ "$verb" = retire ] || put "${user}_LOGIN" "$other:$(value "$variable")"
  echo "$other: $variable is new"
done
