#!/bin/sh
# Gives the deployment so many cells. The first is that of compose.yaml. Each other one gets NATS servers, routers and
# workers like it, in compose.override.yaml, which docker compose reads by itself; the gateway is connected to all.
#
#   ./cells.sh 3
#   docker compose up --build --wait     # now there are cell-1-nats-1, cell-1-router, cell-1-worker and so on
#
# Run it again after an upgrade. docs/cells.md says how a deployment gets fewer cells.
set -eu
cd "$(dirname "$0")"
MADE='# Made by cells.sh; edits are lost.'
FILE=compose.override.yaml
case ${1:-} in
  [1-9] | 1[0-6]) CELLS=$1 ;;
  *) echo "cells.sh: '${1:-}' is no number of cells: say one from 1 to 16" >&2; exit 2 ;;
esac
if [ -e $FILE ] && [ "$(head -n 1 $FILE)" != "$MADE" ]; then
  echo "cells.sh: $PWD/$FILE is not of this script: name it differently, and give both files to docker compose with -f" >&2
  exit 1
fi
rm -f $FILE nats.cell-*.conf
if [ "$CELLS" = 1 ]; then
  echo "one cell: $PWD/$FILE is removed"
  exit
fi

# Of a cell: services like those of the first. Prometheus finds them by the names of those.
services() {
  awk -v cell="$1" '
    function route(number) {
      return "ROUTE_" number ": \"nats-route://route:${SYS_PASSWORD}@" own "nats-" number ":6222\""
    }
    BEGIN { own = "cell-" cell "-" }
    /^[a-z]/ { inside = $1 == "services:"; kept = 0; next }
    inside && /^  [a-z]/ {
      name = $1
      sub(/:$/, "", name)
      kept = name ~ /^(nats-[123]|router|worker|worker-gpu)$/
      if (kept) print "  " own name ":"
      if (kept && name !~ /^nats/) print "    networks: {default: {aliases: [" name "]}}"
      next
    }
    !kept || !NF || /^ *#/ || /^    ports:/ { next }
    {
      gsub(/nats-[123]/, own "&")
      gsub(/&worker/, "\\&" own "worker") # anchors are those of the whole file
      gsub(/[*]worker/, "*" own "worker")
      sub(/\/nats\.conf/, "/nats.cell-" cell ".conf")
      sub(/count: 1,/, "device_ids: [\"" cell "\"],")
      if (/ NODE: /) sub(/}$/, ", " route(1) ", " route(2) ", " route(3) "}")
      print
      if (/^    environment:( &.*)?$/) print "      PENSTOCK_NAMESPACE: ps-" cell
    }
  ' compose.yaml
}

# What processes of all cells are told, which log in as $1.
all_cells() {
  urls= cell=1
  while [ $cell -lt "$CELLS" ]; do
    each=
    for server in 1 2 3; do
      each="$each;nats://\${$1:?run ./passwords.sh first}@cell-$cell-nats-$server:4222"
    done
    urls="$urls,${each#;}" cell=$((cell + 1))
  done
  echo "    environment:"
  echo "      PENSTOCK_CELLS: \"$CELLS\""
  echo "      PENSTOCK_CELL_NATS_URLS: \"${urls#,}\""
}

{
  echo "$MADE"
  sed -n '/^services:/q; /^x-/,$p' compose.yaml
  echo "services:"
  echo "  gateway:"
  all_cells GATEWAY_LOGIN
  echo '      PENSTOCK_ACTIVE_CELLS: "${ACTIVE_CELLS:-0}"'
  echo "  streams:"
  all_cells OPERATOR_LOGIN
  echo "    depends_on:"
  cell=1
  while [ $cell -lt "$CELLS" ]; do
    for server in 1 2 3; do
      echo "      cell-$cell-nats-$server: {condition: service_healthy}"
    done
    cell=$((cell + 1))
  done
  cell=1
  while [ $cell -lt "$CELLS" ]; do
    services $cell
    cell=$((cell + 1))
  done
  echo "volumes:"
  cell=1
  while [ $cell -lt "$CELLS" ]; do
    for server in 1 2 3; do
      echo "  cell-$cell-nats-$server:"
    done
    cell=$((cell + 1))
  done
} > $FILE
cell=1
while [ $cell -lt "$CELLS" ]; do
  sed "s/\([^A-Za-z0-9]\)ps\([._]\)/\1ps-$cell\2/g" nats.conf > nats.cell-$cell.conf
  cell=$((cell + 1))
done
echo "$CELLS cells: those behind the first are in $PWD/$FILE"
