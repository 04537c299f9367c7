#!/usr/bin/perl
# Perl: a fork that is asked over a pair of pipes, alarms, and a sorted table in memory.
use strict;
use warnings;
use IO::Handle;
$| = 1;
my %table = map { $_ => $_ * $_ } 1 .. 20000;
my $alarms = 0;
$SIG{ALRM} = sub { $alarms++ };
pipe(my $from_child, my $to_parent) or die;
pipe(my $from_parent, my $to_child) or die;
my $child = fork();
if (!$child) {
    close $to_child;
    select($to_parent);
    $| = 1;
    while (my $number = <$from_parent>) { print $to_parent $number * 2, "\n" }
    exit 7;
}
close $from_parent;
close $to_parent;
$to_child->autoflush(1);
print "started\n";
my $count = 0;
until (-e $ENV{END}) {
    $count++;
    print $to_child "$count\n";
    my $answer = <$from_child>;
    die "changed: the child answered $answer to $count\n" if $answer != 2 * $count;
    die "changed: the table\n" if $table{ $count % 20000 + 1 } != ($count % 20000 + 1)**2;
    my $before = $alarms;
    alarm 1;
    select(undef, undef, undef, 1.5);
    die "changed: no alarm\n" if $alarms == $before;
}
close $to_child;
waitpid $child, 0;
die "changed: the status of the child\n" if $? >> 8 != 7;
