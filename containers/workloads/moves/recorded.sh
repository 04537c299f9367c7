#!/bin/bash
# Lines that script(1) records from a program in a terminal. It stops when it learns that the program has been stopped.
directory=$(mktemp -d "$HOME/recorded.XXXXXX")
trap 'rm -rf "$directory"' EXIT
# shellcheck disable=SC2016 # expanded by the shell in the terminal
count='number=0; until [ -e "$END" ]; do number=$((number + 1)); echo "number $number"; sleep 0.05; done'
script --quiet --return --flush --command "bash -c '$count'" "$directory/lines" </dev/null >/dev/null &
recorder=$!
until grep -q '^number 1' "$directory/lines" 2>/dev/null; do sleep 0.1; done
echo started
before=0
until [ -e "$END" ]; do
  sleep 2
  lines=$(grep -c '^number' "$directory/lines")
  [ "$lines" -gt "$before" ] || { echo "changed: nothing was recorded after line $before"; exit 1; }
  before=$lines
done
wait "$recorder" || { echo "changed: script ended with $?"; exit 1; }
grep -o '^number [0-9]*' "$directory/lines" | awk '$2 != NR { print "changed: line " NR " is missing"; exit 1 }'
