#!/bin/bash
# Reads lines of a here-document, which is a removed file or a pipe, during the moves.
exec 8< <(seq 1 100000)
exec 9<<TEXT
$(seq 1 100000)
TEXT
echo started
for ((number = 1; number <= 100000; number++)); do
  read -r first <&8
  read -r second <&9
  [ "$first $second" = "$number $number" ] || { echo "changed: read $first and $second as line $number"; exit 1; }
  [ ! -e "$END" ] || exit 0
  sleep 0.05
done
