/*
 * A sample.
 */

#include "tests/harness.h"

int main(void)
{
    EXPECT(1 + 1 == 2);
    HARNESS_END();
}
