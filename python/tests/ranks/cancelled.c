// A thread that is to be cancelled makes a window: the call returns first, and the thread ends then.
#include <mpi.h>
#include <pthread.h>
#include <stdio.h>

static MPI_Win window;
static int made;

static void *make(void *unused)
{
    char *bytes;
    // It takes effect at the next cancellation point, such as a file that is opened.
    pthread_cancel(pthread_self());
    MPI_Win_allocate(1 << 20, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &bytes, &window);
    made = 1;
    pthread_testcancel();
    return unused;
}

int main(int argc, char **argv)
{
    int level;
    void *ended;
    pthread_t thread;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
    if (pthread_create(&thread, NULL, make, NULL) != 0 || pthread_join(thread, &ended) != 0)
        return 1;
    if (!made || ended != PTHREAD_CANCELED)
        return 2;
    MPI_Win_free(&window);
    MPI_Finalize();
    puts("is done");
    return 0;
}
