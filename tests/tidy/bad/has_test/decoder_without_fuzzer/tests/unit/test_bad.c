/*
 * A sample.
 */

int main(void)
{
    return 0;
}
