#!/bin/bash
# Two processes that pass numbers through a FIFO by name, and back through a pipe.
directory=$(mktemp -d "$HOME/fifo.XXXXXX")
fifo=$directory/fifo
mkfifo "$fifo"
trap 'rm -rf "$directory"' EXIT
coproc BACK { while read -r number; do echo $((number + 1)); done <"$fifo"; }
exec 7>"$fifo"
number=0
echo started
until [ -e "$END" ]; do
  echo "$number" >&7
  read -r next <&"${BACK[0]}"
  [ "$next" = $((number + 1)) ] || { echo "changed: $next came after $number"; exit 1; }
  number=$next
  sleep 0.05
done
