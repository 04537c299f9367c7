#!/bin/bash
# Traps of signals and of the end, job control variables, and a background job that is waited for.
count=0
trap 'count=$((count + 1))' USR1
trap 'echo "trap of the end ran"' EXIT
sleep 100000 &
child=$!
echo started
sent=0
until [ -e "$END" ]; do
  kill -USR1 $$
  sent=$((sent + 1))
  [ "$count" = "$sent" ] || { echo "changed: $count signals of $sent arrived"; exit 1; }
  [ "$!" = "$child" ] || { echo "changed: the number of the background job"; exit 1; }
  kill -0 "$child" || { echo "changed: the background job"; exit 1; }
  sleep 0.1
done
kill "$child"
wait "$child"
[ $? = 143 ] || { echo "changed: the status of the background job"; exit 1; }
