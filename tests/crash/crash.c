/*
 * kill -9 at random moments loses nothing that was acknowledged at level SSD.
 *
 * Eight writers of three users send what harnesses send; the daemon is killed, started again, and
 * everything is compared (compare.c).
 */

#include "tests/crash/drive.h"

static const char help[] = "Kills the daemon while eight sessions of three users write, starts it "
                           "again and compares what\n"
                           "is there with what was acknowledged.\n"
                           "\n"
                           "  --kills N      how many (default 50)\n";

int main(int argc, char **argv)
{
    struct cr_options options = {.program = "crash", .unit = "kills", .seed = 1, .count = 50};
    const struct cr_medium medium = {0};
    cr_parse(argc, argv, help, &options);
    return cr_drive(&options, &medium);
}
